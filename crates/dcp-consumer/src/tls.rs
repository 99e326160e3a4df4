//! TLS: certificates read and verified.
