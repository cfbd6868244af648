"""The laboratory: published numbers beside ours, and the page of a report."""
