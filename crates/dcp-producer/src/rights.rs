//! Privileges of a user.

use dcp_producer_proto::Privilege;
use dcp_wire::{CollectionId, Opcode};

use crate::bucket::Manifest;

/// Privileges of a user.
#[derive(Clone, Debug)]
pub(crate) enum Rights {
    /// Everything.
    All,
    /// Those of the role *Data DCP Reader*, on these scopes and collections, or on the bucket.
    Reader(Option<Vec<String>>),
    /// None: not authenticated.
    Nothing,
}

impl Rights {
    /// The privilege that is missing for a command, regardless of its document.
    pub(crate) fn missing(&self, opcode: Opcode) -> Option<&'static str> {
        if matches!(self, Self::All) {
            return None;
        }
        match opcode {
            Opcode::STAT => Some("SimpleStats"),
            Opcode::SET_WITH_META | Opcode::ADD_WITH_META | Opcode::DELETE_WITH_META => {
                Some("MetaWrite")
            }
            Opcode::ADD => Some("Insert"),
            Opcode::DELETE | Opcode::SUBDOC_DELETE => Some("Delete"),
            Opcode::SET
            | Opcode::REPLACE
            | Opcode::INCREMENT
            | Opcode::DECREMENT
            | Opcode::APPEND
            | Opcode::PREPEND
            | Opcode::TOUCH
            | Opcode::GET_AND_TOUCH
            | Opcode::GET_LOCKED
            | Opcode::UNLOCK
            | Opcode::SUBDOC_MULTI_MUTATION
            | Opcode::SUBDOC_DICT_ADD
            | Opcode::SUBDOC_DICT_UPSERT
            | Opcode::SUBDOC_REPLACE
            | Opcode::SUBDOC_ARRAY_PUSH_LAST
            | Opcode::SUBDOC_ARRAY_PUSH_FIRST
            | Opcode::SUBDOC_ARRAY_INSERT
            | Opcode::SUBDOC_ARRAY_ADD_UNIQUE
            | Opcode::SUBDOC_COUNTER => Some("Upsert"),
            _ => None,
        }
    }

    /// Whether the user may read anything.
    pub(crate) fn reads_something(&self) -> bool {
        match self {
            Self::All | Self::Reader(None) => true,
            Self::Reader(Some(names)) => !names.is_empty(),
            Self::Nothing => false,
        }
    }

    /// Whether the user may read a collection.
    pub(crate) fn reads(&self, id: CollectionId, manifest: &Manifest) -> bool {
        let names = match self {
            Self::All | Self::Reader(None) => return true,
            Self::Reader(Some(names)) => names,
            Self::Nothing => return false,
        };
        manifest.scopes().iter().any(|scope| {
            let found = scope.collections.iter().find(|collection| collection.id == id);
            found.is_some_and(|collection| {
                let path = format!("{}.{}", scope.name, collection.name);
                names.iter().any(|name| *name == path || *name == scope.name)
            })
        })
    }

    /// Whether the user has a privilege of DCP.
    pub(crate) fn has(&self, privilege: Privilege, manifest: &Manifest) -> bool {
        match privilege {
            Privilege::Produce => self.reads_something(),
            Privilege::Consume => matches!(self, Self::All),
            Privilege::StreamBucket => matches!(self, Self::All | Self::Reader(None)),
            Privilege::StreamCollection(id) => self.reads(id, manifest),
        }
    }
}
