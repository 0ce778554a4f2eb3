"""What the operator serves: its own gRPC service, the admission webhook and the web page."""
