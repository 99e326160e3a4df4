//! TLS: the nodes' certificates, and the client certificates they accept.

mod authority;
mod options;
mod subject;

use std::net::IpAddr;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

use authority::Identity;
use options::invalid;
pub use options::{NodeCertificate, TlsOptions};
pub(crate) use subject::common_name;

use crate::Error;

/// TLS configuration of a cluster's nodes.
pub(crate) struct Tls {
    pub(crate) acceptor: TlsAcceptor,
    /// The authority that was created for this cluster, as PEM.
    pub(crate) ca_pem: Option<String>,
}

impl Tls {
    /// Creates or reads the certificates for nodes at `host`.
    pub(crate) fn new(options: &TlsOptions, host: IpAddr) -> Result<Self, Error> {
        let ((chain, key), ca_pem) = match &options.certificate {
            Some(certificate) => (given(certificate)?, None),
            None => {
                let (identity, ca_pem) = authority::issue(host).map_err(|error| Error::Tls {
                    reason: "no certificate could be generated".to_owned(),
                    source: Box::new(error),
                })?;
                (identity, Some(ca_pem))
            }
        };
        // Names the provider explicitly, so that another crate's default cannot replace it.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Tls {
                reason: "the TLS library refuses its own defaults".to_owned(),
                source: Box::new(error),
            })?;
        let builder = match &options.client_ca {
            None => builder.with_no_client_auth(),
            Some(ca) => builder.with_client_cert_verifier(verifier(
                ca,
                options.require_client_certificate,
                provider,
            )?),
        };
        let config = builder.with_single_cert(chain, key).map_err(|error| {
            invalid("tls.certificate", format!("certificate and key do not match: {error}"))
        })?;
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)), ca_pem })
    }
}

fn given(certificate: &NodeCertificate) -> Result<Identity, Error> {
    let chain = certificates(&certificate.chain_pem, "tls.certificate")?;
    let key = PrivateKeyDer::from_pem_slice(certificate.key_pem.as_bytes()).map_err(|_| {
        invalid("tls.certificate", "the key must be an unencrypted PEM key".to_owned())
    })?;
    Ok((chain, key))
}

fn verifier(
    ca: &str,
    is_required: bool,
    provider: Arc<rustls::crypto::CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, Error> {
    let unusable = |reason: String| invalid("tls.client_ca", reason);
    let mut roots = RootCertStore::empty();
    for certificate in certificates(ca, "tls.client_ca")? {
        roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let builder = if is_required { builder } else { builder.allow_unauthenticated() };
    builder.build().map(|verifier| verifier as _).map_err(|error| unusable(error.to_string()))
}

fn certificates(pem: &str, option: &'static str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| invalid(option, format!("not PEM: {error}")))?;
    if certificates.is_empty() {
        return Err(invalid(option, "must hold a PEM certificate".to_owned()));
    }
    Ok(certificates)
}
