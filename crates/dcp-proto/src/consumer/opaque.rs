//! Opaques that distinguish the answer to the current request from answers to requests it replaced.

use dcp_wire::{Opaque, Vbid};

/// Creates opaques: the vBucket in the low 16 bits and a version above them, so that an opaque is
/// reused only after 65,535 other requests.
///
/// Version 0 is for requests that concern the connection.
#[derive(Debug)]
pub(super) struct Opaques {
    version: u16,
}

impl Opaques {
    pub(super) const fn new() -> Self {
        Self { version: 0 }
    }

    /// A new opaque for a request about `vbid`.
    pub(super) fn stream(&mut self, vbid: Vbid) -> Opaque {
        self.version = self.version.checked_add(1).unwrap_or(1);
        Opaque(u32::from(self.version) << 16 | u32::from(vbid.0))
    }
}

/// The vBucket an opaque was made for.
pub(super) const fn vbid_of(opaque: Opaque) -> Vbid {
    Vbid((opaque.0 & 0xffff) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_opaque_names_its_vbucket_and_is_new_each_time() {
        let mut opaques = Opaques::new();
        let first = opaques.stream(Vbid(1023));
        let second = opaques.stream(Vbid(1023));
        assert_ne!(first, second);
        assert_eq!((vbid_of(first), vbid_of(second)), (Vbid(1023), Vbid(1023)));
    }

    #[test]
    fn version_0_is_left_out_when_versions_wrap() {
        let mut opaques = Opaques { version: u16::MAX };
        assert_eq!(opaques.stream(Vbid(0)), Opaque(1 << 16));
    }
}
