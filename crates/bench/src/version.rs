//! Version of the program and the system, as every report has them.
