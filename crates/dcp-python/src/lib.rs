//! Python extension module of dcp_rs.
