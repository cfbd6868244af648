from setuptools import setup

setup()  # metadata: [project] in pyproject.toml
