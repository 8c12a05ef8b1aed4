"""`octavo bench`: load on running servers, and the machine's limits beside what Octavo reaches."""
