from setuptools import setup  # metadata: [project] in pyproject.toml
setup()
