//! Opaques that distinguish the answer to the current request from answers to requests it replaced.

use dcp_wire::{Opaque, Vbid};

/// Creates opaques, each of which is reused only after 65,535 other requests. Those about a vBucket
/// have it in the low 16 bits and a version above them. Those about the connection have version 0
/// and a number.
#[derive(Debug, Default)]
pub(super) struct Opaques {
    version: u16,
    number: u16,
}

impl Opaques {
    /// A new opaque for a request about `vbid`.
    pub(super) fn vbucket(&mut self, vbid: Vbid) -> Opaque {
        self.version = self.version.checked_add(1).unwrap_or(1);
        Opaque(u32::from(self.version) << 16 | u32::from(vbid.0))
    }

    /// A new opaque for a request about the connection.
    pub(super) fn connection(&mut self) -> Opaque {
        self.number = self.number.checked_add(1).unwrap_or(1);
        Opaque(self.number.into())
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
    fn opaque_names_its_vbucket_and_is_new_each_time() {
        let mut opaques = Opaques::default();
        let first = opaques.vbucket(Vbid(1023));
        let second = opaques.vbucket(Vbid(1023));
        assert_ne!(first, second);
        assert_eq!((vbid_of(first), vbid_of(second)), (Vbid(1023), Vbid(1023)));
    }

    #[test]
    fn opaque_0_and_version_0_are_left_out_when_they_wrap() {
        let mut opaques = Opaques { version: u16::MAX, number: u16::MAX };
        assert_eq!(opaques.vbucket(Vbid(0)), Opaque(1 << 16));
        assert_eq!(opaques.connection(), Opaque(1), "0 is that of packets without one");
    }
}
