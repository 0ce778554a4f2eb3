"""Generated from the .proto files of this folder by ``make generate``; never edited."""
