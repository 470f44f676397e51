"""Predicts what a run takes before it starts: parameters, memory, FLOPs, communication, time, and which layouts fit."""
