"""Planning: from a workload and a service level to deployments, what they cost and what binds them."""
