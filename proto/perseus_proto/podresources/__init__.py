"""The kubelet's PodResources service, generated from the .proto file of this folder by ``make generate``; never
edited.
"""
