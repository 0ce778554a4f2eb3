"""The kubelet's device plugin service, generated from the .proto file of this folder by ``make generate``; never
edited.
"""
