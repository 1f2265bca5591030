"""How a model lies over a mesh of devices, described before anything is computed: which device holds what."""
