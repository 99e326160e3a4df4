//! Names of collections.

use std::fmt;
use std::sync::Arc;

use dcp_wire::CollectionId;

/// Name of a collection and of the scope it lies in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CollectionName {
    /// Scope.
    pub scope: Arc<str>,
    /// Collection.
    pub collection: Arc<str>,
}

impl CollectionName {
    /// The name of `collection` in `scope`.
    #[must_use]
    pub fn new(scope: impl Into<Arc<str>>, collection: impl Into<Arc<str>>) -> Self {
        Self { scope: scope.into(), collection: collection.into() }
    }
}

/// Looks collections up by id, in whatever manifest is current at the time.
///
/// Asked once per collection and batch. A lookup should still answer for a collection dropped a
/// while ago: its last changes may be on their way.
#[derive(Clone)]
pub struct CollectionNames(Arc<dyn Fn(CollectionId) -> Option<CollectionName> + Send + Sync>);

impl CollectionNames {
    /// Names found by `lookup`; `None` becomes null in the table.
    #[must_use]
    pub fn new(
        lookup: impl Fn(CollectionId) -> Option<CollectionName> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(lookup))
    }

    /// The name of a collection, if it is known.
    #[must_use]
    pub fn name(&self, id: CollectionId) -> Option<CollectionName> {
        (self.0)(id)
    }
}

impl Default for CollectionNames {
    /// Knows the default collection only, as on a bucket without a manifest.
    fn default() -> Self {
        Self::new(|id| {
            (id == CollectionId::DEFAULT).then(|| CollectionName::new("_default", "_default"))
        })
    }
}

impl fmt::Debug for CollectionNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectionNames").finish_non_exhaustive()
    }
}
