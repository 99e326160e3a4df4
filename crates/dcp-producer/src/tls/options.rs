//! TLS options of a cluster.

use std::fmt;

use zeroize::Zeroizing;

use crate::Error;

/// TLS options of an embedded cluster.
///
/// By default, an authority and a certificate for loopback are created when the cluster starts, and
/// clients authenticate with SASL.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TlsOptions {
    /// The nodes' certificate; `None` to create an authority, which
    /// [`Producer::ca_pem`](crate::Producer::ca_pem) returns, and a certificate.
    pub certificate: Option<NodeCertificate>,
    /// Authorities, as PEM, whose certificates authenticate clients: the subject's common name must
    /// be the user's name, and such a client must not use SASL. `None` to request no client
    /// certificates.
    pub client_ca: Option<String>,
    /// Whether clients without a certificate are refused. Default false.
    pub require_client_certificate: bool,
}

/// The nodes' certificate and its key.
#[derive(Clone)]
pub struct NodeCertificate {
    pub(crate) chain_pem: String,
    pub(crate) key_pem: Zeroizing<String>,
}

impl NodeCertificate {
    /// `chain_pem` holds the nodes' certificate, then those that signed it; `key_pem` its
    /// unencrypted private key. They are checked when the cluster starts.
    #[must_use]
    pub fn new(chain_pem: impl Into<String>, key_pem: impl Into<String>) -> Self {
        Self { chain_pem: chain_pem.into(), key_pem: Zeroizing::new(key_pem.into()) }
    }
}

impl fmt::Debug for NodeCertificate {
    /// Leaves the key out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCertificate").finish_non_exhaustive()
    }
}

impl TlsOptions {
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.require_client_certificate && self.client_ca.is_none() {
            let reason = "needs `client_ca`: no certificate could be accepted".to_owned();
            return Err(invalid("tls.require_client_certificate", reason));
        }
        Ok(())
    }
}

pub(super) fn invalid(option: &'static str, reason: String) -> Error {
    Error::InvalidOption { option, reason }
}
