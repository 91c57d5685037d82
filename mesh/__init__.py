"""Devices and named axes: one mesh of atoms, seen as a dense and as an expert factorisation."""
