//! A server that plays the server's side of a recording.
