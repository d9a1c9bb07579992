"""The objects for Kubernetes, rendered from the plain files beside them; see `__main__`."""
