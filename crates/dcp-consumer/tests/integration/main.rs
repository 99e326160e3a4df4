//! The consumer against sockets on loopback.

mod checkpoint_file;
mod connect;
mod data_service;
mod embedded;
mod replay;
mod rows;
mod tls;
