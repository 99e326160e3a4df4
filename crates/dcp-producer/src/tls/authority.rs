//! A certificate authority for one cluster.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A chain of certificates, the node's first, and its private key.
pub(super) type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// A certificate for nodes at `host` and on loopback, and the PEM of the authority that signed it.
/// The authority's key is discarded.
pub(super) fn issue(host: IpAddr) -> Result<(Identity, String), rcgen::Error> {
    let mut authority = CertificateParams::default();
    // The name is unique, since clients find authorities by name and a trust store may have those
    // of several clusters.
    let name = format!("dcp_rs embedded cluster {:016x}", StdRng::from_os_rng().random::<u64>());
    authority.distinguished_name.push(DnType::CommonName, name);
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority_key = KeyPair::generate()?;
    let ca_pem = authority.self_signed(&authority_key)?.pem();
    let issuer = Issuer::new(authority, authority_key);

    let mut node = CertificateParams::new(vec!["localhost".to_owned()])?;
    node.distinguished_name.push(DnType::CommonName, "dcp_rs embedded node");
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    node.subject_alt_names.extend(loopback.map(SanType::IpAddress));
    if !loopback.contains(&host) && !host.is_unspecified() {
        node.subject_alt_names.push(SanType::IpAddress(host));
    }
    node.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    node.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    node.use_authority_key_identifier_extension = true;
    let node_key = KeyPair::generate()?;
    let certificate = node.signed_by(&node_key, &issuer)?;
    let key = PrivateKeyDer::Pkcs8(node_key.serialize_der().into());
    Ok(((vec![certificate.der().clone()], key), ca_pem))
}
