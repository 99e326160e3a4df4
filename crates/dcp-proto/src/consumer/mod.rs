//! The consumer: one machine per connection, one per stream.
