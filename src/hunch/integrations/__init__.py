"""hunch inside other people's servers and schedulers; each file needs the package it names."""
