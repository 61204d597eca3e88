"""What pyproject.toml cannot say: which folders are packages.

``hardware``, ``kernels`` and ``validate`` lie beside ``roofline`` and are its subpackages. In a git checkout
``roofline/kernels`` is a link to ``../kernels``; in a ZIP archive it is a small text file, in an sdist it is absent.
The mapping below holds for all three, since ``os.walk`` follows no links.
"""

import os

from setuptools import setup

FOLDERS = {
    "roofline": "roofline",
    "roofline.hardware": "hardware",
    "roofline.kernels": "kernels",
    "roofline.validate": "validate",
}
SUFFIXES = (".py", ".toml", ".csv", ".json")

packages = [
    (name + here.removeprefix(folder)).replace(os.sep, ".")
    for name, folder in FOLDERS.items()
    for here, _, files in os.walk(folder)
    if any(file.endswith(SUFFIXES) for file in files)
]

setup(packages=packages, package_dir=FOLDERS)
