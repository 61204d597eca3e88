"""What models are made of: each component knows its cost, its parameters and the state it keeps."""
