//! TLS: certificates read, peers verified.

use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{CertificateError, ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use crate::config::{ClientCertificate, Pem, TlsOptions};
use crate::{Error, ErrorKind};

/// The connector for `options`: certificate and host name of the peer are verified.
pub(crate) fn connector(options: &TlsOptions) -> Result<TlsConnector, Error> {
    // The provider is named so that no other crate's default can take its place.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable("TLS could not be set up").with_source(error))?
        .with_root_certificates(roots(options.ca.as_ref())?);
    let config = match &options.client_certificate {
        None => builder.with_no_client_auth(),
        Some(ClientCertificate { chain, key }) => {
            let chain = certificates(chain, "client certificate")?;
            builder.with_client_auth_cert(chain, private_key(key)?).map_err(|error| {
                unusable("client certificate and private key do not fit together")
                    .with_source(error)
            })?
        }
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

fn roots(ca: Option<&Pem>) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    if let Some(ca) = ca {
        for certificate in certificates(ca, "CA certificate")? {
            roots.add(certificate).map_err(|error| {
                unusable("the CA certificate cannot be used").with_source(error)
            })?;
        }
        return Ok(roots);
    }
    let native = rustls_native_certs::load_native_certs();
    // Operating systems ship certificates rustls does not take; the others are enough.
    roots.add_parsable_certificates(native.certs);
    if roots.is_empty() {
        return Err(unusable(
            "the operating system has no certificate authorities: give the cluster's CA certificate",
        ));
    }
    Ok(roots)
}

fn certificates(pem: &Pem, what: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let text = read(pem, what)?;
    let wrong = |error: pem::Error| unusable(format!("the {what} is not PEM")).with_source(error);
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(wrong)?;
    if certificates.is_empty() {
        return Err(unusable(format!("the {what} holds no PEM certificate")));
    }
    Ok(certificates)
}

fn private_key(pem: &Pem) -> Result<PrivateKeyDer<'static>, Error> {
    let text = read(pem, "private key")?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| {
        unusable("the private key is not an unencrypted PEM key").with_source(error)
    })
}

fn read(pem: &Pem, what: &str) -> Result<Zeroizing<Vec<u8>>, Error> {
    match pem {
        Pem::Text(text) => Ok(text.clone()),
        Pem::File(path) => std::fs::read(path).map(Zeroizing::new).map_err(|error| {
            unusable(format!("the {what} could not be read from {}", path.display()))
                .with_source(error)
        }),
    }
}

/// What to check after a connection ended with an alert of the server.
pub(crate) fn alert_advice(error: &std::io::Error) -> Option<&'static str> {
    matches!(rustls_error(error)?, rustls::Error::AlertReceived(_)).then(|| advice(error))
}

fn rustls_error(error: &std::io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// What to check after a handshake failed.
pub(crate) fn advice(error: &std::io::Error) -> &'static str {
    match rustls_error(error) {
        Some(rustls::Error::InvalidCertificate(certificate)) => certificate_advice(certificate),
        Some(rustls::Error::InvalidMessage(_)) => {
            "the port does not speak TLS: use couchbase://, or the TLS port (11207)"
        }
        Some(rustls::Error::AlertReceived(_)) => {
            "check whether the server wants a client certificate, and trusts the one given"
        }
        None => {
            "the peer closed the connection: check that the port speaks TLS (11207), else use \
             couchbase://"
        }
        Some(_) => "check that both sides allow TLS 1.2 or 1.3",
    }
}

fn certificate_advice(error: &CertificateError) -> &'static str {
    match error {
        // A wrong signature is that of an authority with the same name as a trusted one.
        CertificateError::BadSignature | CertificateError::UnknownIssuer => {
            "no trusted authority signed the server's certificate: give the cluster's CA \
             certificate"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "the server's certificate is for another host name: connect by a name it holds"
        }
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => {
            "the server's certificate is not valid now: check its dates and this machine's clock"
        }
        _ => "the server's certificate is not acceptable: the cause says why",
    }
}

fn unusable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Tls, message)
}
