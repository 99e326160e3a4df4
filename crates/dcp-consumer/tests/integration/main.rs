//! The consumer against sockets on loopback.

mod acknowledge;
mod buckets;
mod checkpoint_file;
mod collections;
mod connect;
mod content;
mod data_service;
mod embedded;
mod events;
mod failover;
mod floods;
mod kept;
mod knows;
mod mitigation;
mod observer;
mod planner;
mod replay;
mod reported;
mod retry_timeout;
mod rollbacks;
mod rows;
mod server_tables;
mod set_up;
mod tls;
mod tokens;
mod upgrades;
