//! How a bootstrap handles answers and the server's own requests.

use std::borrow::Cow;

use dcp_wire::message::Features;
use dcp_wire::sasl::{Mechanism, SaslError, select_mechanism};
use dcp_wire::{Feature, Frame, Opcode, Status};
use zeroize::Zeroizing;

use super::config::{Auth, BootstrapError, ClusterConfig, ErrorContext};
use super::{Bootstrap, Step};
use crate::consumer::inflated::inflated;
use crate::consumer::reaction::{self, Reaction};
use crate::topology::{BucketConfig, GlobalConfig, Manifest};

impl Bootstrap {
    pub(super) fn on_hello(&mut self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        success(frame)?;
        let granted = Features::decode(frame.value)
            .map_err(|source| BootstrapError::Malformed { opcode: Opcode::HELLO, source })?;
        for feature in granted.iter() {
            // Ignores features that were granted but not requested.
            if self.config.features.contains(&feature) && !self.features.contains(&feature) {
                self.features.push(feature);
            }
        }
        self.features.sort_unstable();
        let missing =
            self.config.required_features.iter().find(|&feature| !self.features.contains(feature));
        missing.map_or(Ok(()), |&feature| Err(BootstrapError::FeatureMissing(feature)))
    }

    pub(super) fn on_mechanisms(&mut self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        success(frame)?;
        self.mechanism = match &self.config.auth {
            Auth::Certificate => None,
            Auth::Password { mechanisms, .. } => Some(select_mechanism(frame.value, mechanisms)?),
            Auth::Token(_) => {
                let selected = select_mechanism(frame.value, &[Mechanism::OAuthBearer]);
                Some(selected.map_err(|_: SaslError| BootstrapError::NoTokens)?)
            }
        };
        Ok(())
    }

    pub(super) fn on_authenticate(&mut self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        if let Auth::Token(_) = self.config.auth {
            return token_accepted(frame);
        }
        let Some(scram) = &mut self.scram else {
            // PLAIN ends with the first answer.
            return authenticated(frame);
        };
        match frame.header.status() {
            Status::AUTH_CONTINUE => {}
            // A server that skips the exchange has not shown that it knows the password.
            Status::SUCCESS => return Err(SaslError::ServerSignature.into()),
            _ => return authenticated(frame),
        }
        let message = Zeroizing::new(scram.respond(frame.value)?);
        let name = self.mechanism.map_or("", Mechanism::name);
        let step = Frame::request(Opcode::SASL_STEP).with_key(name.as_bytes());
        self.send(Step::ProveIdentity, step.with_value(&message))?;
        self.send_configure()
    }

    pub(super) fn on_authenticate_step(&mut self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        authenticated(frame)?;
        match self.scram.take() {
            Some(mut scram) => Ok(scram.verify(frame.value)?),
            None => Err(BootstrapError::Unexpected { opcode: Opcode::SASL_STEP }),
        }
    }

    pub(super) fn on_select_bucket(&self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        let bucket = self.config.bucket.clone().unwrap_or_default();
        match frame.header.status() {
            Status::SUCCESS => Ok(()),
            Status::KEY_ENOENT => Err(BootstrapError::BucketNotFound { bucket }),
            Status::EACCESS => Err(BootstrapError::BucketAccess { bucket }),
            Status::NOT_SUPPORTED if self.features.contains(&Feature::COLLECTIONS) => {
                Err(BootstrapError::FeatureMissing(Feature::COLLECTIONS))
            }
            _ => Err(refused(frame)),
        }
    }

    pub(super) fn on_cluster_config(&mut self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        match frame.header.status() {
            Status::SUCCESS => {}
            status @ (Status::KEY_ENOENT | Status::NO_BUCKET | Status::ECONFIG_ONLY) => {
                return Err(BootstrapError::NoConfig { status });
            }
            _ => return Err(refused(frame)),
        }
        let json = body(frame)?;
        let parsed = self.parse_config(&json)?;
        self.keep_newer(parsed);
        Ok(())
    }

    fn parse_config(&self, json: &[u8]) -> Result<ClusterConfig, BootstrapError> {
        let host = &self.config.connected_host;
        Ok(match self.config.bucket {
            Some(_) => ClusterConfig::Bucket(BucketConfig::parse(json, host)?),
            None => ClusterConfig::Global(GlobalConfig::parse(json, host)?),
        })
    }

    fn keep_newer(&mut self, config: ClusterConfig) {
        match &self.cluster {
            Some(current) if config.revision() <= current.revision() => {}
            _ => self.cluster = Some(config),
        }
    }

    pub(super) fn on_manifest(&mut self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        self.manifest = Some(match Reaction::to(reaction::Step::Manifest, frame.header.status()) {
            Reaction::Use => Manifest::parse(&body(frame)?)?,
            Reaction::GoWithout => Manifest::default(),
            _ => return Err(refused(frame)),
        });
        Ok(())
    }

    pub(super) fn on_control(
        &mut self,
        index: usize,
        frame: &Frame<'_>,
    ) -> Result<(), BootstrapError> {
        let setting = self.config.dcp.as_ref().and_then(|dcp| dcp.controls.get(index));
        let Some(setting) = setting else { return Ok(()) };
        let status = frame.header.status();
        let context = ErrorContext::of(frame.value);
        if status.is_success() {
            self.controls.push(setting.key);
            return Ok(());
        }
        let step = match setting.required {
            true => reaction::Step::RequiredControl,
            false => reaction::Step::OptionalControl,
        };
        if Reaction::to(step, status) != Reaction::GoWithout {
            let (key, value) = (setting.key, setting.value.clone());
            return Err(BootstrapError::ControlRefused { key, value, status, context });
        }
        tracing::debug!(key = setting.key, %status, %context, "the server rejected a setting");
        Ok(())
    }

    /// A request from the server. None needs an answer; an invalid configuration does no harm,
    /// since one has been requested.
    pub(super) fn handle_push(&mut self, frame: &Frame<'_>) {
        let ours = self.config.bucket.as_ref().is_some_and(|name| name.as_bytes() == frame.key);
        if frame.header.opcode != Opcode::CLUSTER_MAP_CHANGE || !ours || frame.value.is_empty() {
            return;
        }
        match body(frame).and_then(|json| self.parse_config(&json)) {
            Ok(config) => self.keep_newer(config),
            Err(error) => tracing::debug!(%error, "ignoring a pushed configuration"),
        }
    }
}

fn success(frame: &Frame<'_>) -> Result<(), BootstrapError> {
    let status = frame.header.status();
    if status.is_success() {
        return Ok(());
    }
    Err(refused(frame))
}

/// A refusal that no other variant covers.
pub(super) fn refused(frame: &Frame<'_>) -> BootstrapError {
    BootstrapError::Status {
        opcode: frame.header.opcode,
        status: frame.header.status(),
        context: ErrorContext::of(frame.value),
    }
}

fn token_accepted(frame: &Frame<'_>) -> Result<(), BootstrapError> {
    match frame.header.status() {
        Status::SUCCESS => Ok(()),
        status if status.is_temporary() => Err(refused(frame)),
        // Even one that is malformed to the server has been checked here.
        status => {
            Err(BootstrapError::TokenRefused { status, context: ErrorContext::of(frame.value) })
        }
    }
}

fn authenticated(frame: &Frame<'_>) -> Result<(), BootstrapError> {
    match frame.header.status() {
        Status::AUTH_ERROR | Status::EACCESS | Status::KEY_ENOENT => {
            Err(BootstrapError::AuthenticationFailed { context: ErrorContext::of(frame.value) })
        }
        _ => success(frame),
    }
}

/// The value of a response, inflated if it is compressed.
fn body<'a>(frame: &Frame<'a>) -> Result<Cow<'a, [u8]>, BootstrapError> {
    let opcode = frame.header.opcode;
    inflated(frame).map_err(|source| BootstrapError::Malformed { opcode, source })
}
