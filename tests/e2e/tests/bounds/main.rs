//! What hostile peers can make a client or a cluster hold, as this process's allocator counts it.

mod allocator;
mod floods;
mod tap;
