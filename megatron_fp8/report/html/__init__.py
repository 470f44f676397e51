"""`report.html`: a self-contained file that shows a run, or compares several, made from what run directories hold."""
