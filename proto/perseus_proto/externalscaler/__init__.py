"""KEDA's external scaler, generated from the .proto file of this folder by ``make generate``; never edited."""
