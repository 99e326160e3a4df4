//! The subject of a client certificate.

use rustls::pki_types::CertificateDer;
use x509_cert::Certificate;
use x509_cert::der::asn1::{PrintableStringRef, Utf8StringRef};
use x509_cert::der::oid::db::rfc4519::COMMON_NAME;
use x509_cert::der::{Decode, Tag, Tagged};

/// The last common name in the subject of a certificate whose signature was verified; `None` if it
/// has none that is text.
pub(crate) fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let certificate = Certificate::from_der(certificate).ok()?;
    let attributes = certificate.tbs_certificate().subject().iter();
    let value = &attributes.filter(|attribute| attribute.oid == COMMON_NAME).last()?.value;
    match value.tag() {
        Tag::Utf8String => Some(value.decode_as::<Utf8StringRef<'_>>().ok()?.as_str().to_owned()),
        Tag::PrintableString => {
            Some(value.decode_as::<PrintableStringRef<'_>>().ok()?.as_str().to_owned())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, DnValue, KeyPair};

    use super::*;

    fn certificate(name: DistinguishedName) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name;
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().clone()
    }

    #[test]
    fn certificate_common_name_is_read_in_either_form() {
        let printable = DnValue::PrintableString("Administrator".try_into().unwrap());
        for value in [DnValue::Utf8String("Jürgen".to_owned()), printable] {
            let mut name = DistinguishedName::new();
            name.push(DnType::OrganizationName, "other");
            name.push(DnType::CommonName, value.clone());
            let expected = match value {
                DnValue::Utf8String(text) => text,
                _ => "Administrator".to_owned(),
            };
            assert_eq!(common_name(&certificate(name)), Some(expected));
        }
    }

    #[test]
    fn certificate_without_a_common_name_is_for_nobody() {
        assert_eq!(common_name(&certificate(DistinguishedName::new())), None);
        assert_eq!(common_name(&CertificateDer::from(&b"\x30\x82\xff\xff"[..])), None);
    }
}
