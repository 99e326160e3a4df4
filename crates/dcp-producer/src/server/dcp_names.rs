//! Names of DCP connections: a new connection of the same name ends the older one.

use std::sync::{Mutex, PoisonError};

use rustc_hash::FxHashMap;
use tokio_util::sync::CancellationToken;

/// The named connections of a node and how to end them.
#[derive(Debug, Default)]
pub(super) struct DcpNames {
    connections: Mutex<FxHashMap<Vec<u8>, Named>>,
}

#[derive(Debug)]
struct Named {
    id: u64,
    evicted: CancellationToken,
}

impl DcpNames {
    /// Assigns `name` to a connection and ends the one that had it.
    pub(super) fn claim(&self, name: &[u8], id: u64, evicted: CancellationToken) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(older) = connections.insert(name.to_vec(), Named { id, evicted }) {
            older.evicted.cancel();
        }
    }

    /// Frees the name if it still belongs to that connection.
    pub(super) fn release(&self, name: &[u8], id: u64) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if connections.get(name).is_some_and(|named| named.id == id) {
            connections.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dcp_name_ends_its_former_owner_and_only_its_owner_frees_it() {
        let names = DcpNames::default();
        let (first, second) = (CancellationToken::new(), CancellationToken::new());
        names.claim(b"reader", 1, first.clone());
        assert!(!first.is_cancelled());
        names.claim(b"reader", 2, second.clone());
        assert!(first.is_cancelled() && !second.is_cancelled());
        names.release(b"reader", 1);
        names.claim(b"reader", 3, CancellationToken::new());
        assert!(second.is_cancelled(), "the name was still the second one's");
    }
}
