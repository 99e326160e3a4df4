//! The embedded producer, the consumer and record batches, put together.

mod filtered;
mod finite;
mod first_loads;
mod flow;
mod resume;
mod rollback;
mod topology;
