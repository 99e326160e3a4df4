//! What slow and hostile peers can make a client or a cluster hold, as this process's allocator
//! counts it.

mod backfills;
mod clients;
mod connecting;
mod documents;
mod floods;
mod layouts;
mod messages;
mod servers;
mod tally;
mod tap;
