//! A login by a token, which is renewed on the same connection before the token expires.
//!
//! Once it has expired, the server answers every request but SASL with AUTH_STALE and does nothing
//! else; it closes the connection if it is sent an answer, such as that to a noop. So from a moment
//! before that, requests, acknowledgements and answers to noops are held back until the server has
//! accepted a newer token. It goes on sending what the window allows, which is delivered, and waits
//! for the answer to its noop for minutes.
//!
//! What the server refused with AUTH_STALE nevertheless, because its clock is ahead, was not done: it
//! is sent again, after the newer token.

use std::fmt;
use std::time::{Duration, Instant};

use bytes::BufMut;
use dcp_wire::message::Sasl;
use dcp_wire::sasl::{Mechanism, encode_bearer};
use dcp_wire::{Frame, Header, Opaque, Opcode, Status};
use zeroize::Zeroizing;

use super::stream_request::RequestContext;
use super::{Connection, send, send_close};
use crate::consumer::opaque::vbid_of;
use crate::consumer::stream::State;
use crate::consumer::{ConnectionError, ErrorContext, Token};

/// How long before it expires a newer token is asked for, at most; a tenth of its time if that is
/// shorter.
const MARGIN: Duration = Duration::from_secs(60);

/// The same at least, unless the token is valid for less than twice as long.
const LEAST_MARGIN: Duration = Duration::from_secs(2);

/// How long before it expires everything else is held back: the server cuts the time that is left to
/// whole seconds.
const EARLY: Duration = Duration::from_millis(1100);

/// After what time a newer token is asked for again if there was none.
const RETRY: Duration = Duration::from_secs(1);

/// How long the connection may be without a valid token. Then it ends, and whoever tries to replace it
/// learns why.
const GRACE: Duration = Duration::from_secs(30);

/// A token, and when something has to be done about it.
struct Valid {
    token: Token,
    /// When a newer one is asked for, and from when on everything else is held back; `None` if only
    /// the server knows.
    ask_at: Option<Instant>,
    stale_at: Option<Instant>,
}

impl Valid {
    /// It is `wall` now, counted from 1970.
    fn new(token: &Token, now: Instant, wall: Duration) -> Self {
        // The server, which accepts the token, may know better what time it is.
        let left = token.expires().and_then(|at| at.checked_sub(wall));
        let before = |margin: Duration| now.checked_add(left?.saturating_sub(margin));
        let margin = |left: Duration| MARGIN.min(left / 10).max(LEAST_MARGIN).min(left / 2);
        Self {
            ask_at: left.and_then(|left| before(margin(left))),
            stale_at: before(EARLY),
            token: token.clone(),
        }
    }

    /// Whether `other` is worth sending.
    fn is_older_than(&self, other: &Token) -> bool {
        match (self.token.expires(), other.expires()) {
            (Some(expires), Some(later)) => later > expires,
            _ => self.token.as_str() != other.as_str(),
        }
    }
}

/// What is being done about a newer token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing until then; `None`: until the server says that the token is stale.
    Settled(Option<Instant>),
    /// The driver has to be asked for one.
    Wanted,
    /// The driver gets one.
    Asked,
    /// The server was sent one, with this opaque.
    Sent(Opaque),
}

/// The login of a connection by a token.
pub(super) struct Login {
    phase: Phase,
    accepted: Valid,
    accepted_at: Instant,
    /// What the server was sent.
    offered: Option<Valid>,
    /// SASL_AUTH, until it is taken.
    unsent: Zeroizing<Vec<u8>>,
    /// What the server answered to it.
    answer: Option<(Status, ErrorContext)>,
    /// Whether the server refused a request since time was last told.
    was_refused: bool,
    /// Since when everything else is held back.
    held_since: Option<Instant>,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("phase", &self.phase)
            .field("held_since", &self.held_since)
            .finish_non_exhaustive()
    }
}

impl Login {
    fn new(accepted: Valid, now: Instant) -> Self {
        Self {
            phase: Phase::Settled(accepted.ask_at),
            accepted,
            accepted_at: now,
            offered: None,
            unsent: Zeroizing::default(),
            answer: None,
            was_refused: false,
            held_since: None,
        }
    }

    /// Handles the time, and what the server has answered.
    fn advance(&mut self, now: Instant) -> Result<(), ConnectionError> {
        if let Some((status, context)) = self.answer.take()
            && let Some(offered) = self.offered.take()
        {
            match status {
                Status::SUCCESS => *self = Self::new(offered, now),
                // The earlier login has ended with the attempt.
                status if status.is_temporary() => {
                    self.hold(now);
                    self.ask_again(now);
                }
                status => return Err(ConnectionError::TokenRefused { status, context }),
            }
        }
        if std::mem::take(&mut self.was_refused) {
            // Not at once if the server refuses what it has just accepted.
            self.hold(now.max(self.accepted_at + RETRY));
        }
        if self.accepted.stale_at.is_some_and(|at| now >= at) {
            self.hold(now);
        }
        if self.ends_at().is_some_and(|at| now >= at) {
            return Err(ConnectionError::TokenExpired);
        }
        if matches!(self.phase, Phase::Settled(Some(at)) if now >= at) {
            self.phase = Phase::Wanted;
        }
        Ok(())
    }

    /// Holds everything else back, and asks for a newer token at `ask_at`.
    fn hold(&mut self, ask_at: Instant) {
        if self.held_since.is_none() {
            self.held_since = Some(ask_at);
            if let Phase::Settled(_) = self.phase {
                self.phase = Phase::Settled(Some(ask_at));
            }
        }
    }

    fn ask_again(&mut self, now: Instant) {
        self.phase = Phase::Settled(Some(now + RETRY));
    }

    /// When the connection ends unless a newer token is accepted.
    fn ends_at(&self) -> Option<Instant> {
        self.held_since.map(|since| since + GRACE)
    }

    /// When [`advance`](Self::advance) has something to do.
    fn deadline(&self) -> Option<Instant> {
        let ask_at = match self.phase {
            Phase::Settled(at) => at,
            _ => None,
        };
        let hold_at = self.accepted.stale_at.filter(|_| self.held_since.is_none());
        [ask_at, hold_at, self.ends_at()].into_iter().flatten().min()
    }
}

impl Connection {
    /// The same connection, which was authenticated with `token`; it is `wall` now, counted from
    /// 1970.
    #[must_use]
    pub fn with_token(mut self, now: Instant, wall: Duration, token: &Token) -> Self {
        self.login = Some(Box::new(Login::new(Valid::new(token, now, wall), now)));
        self
    }

    /// Output: whether a newer token is needed; once for each [`renew_token`](Self::renew_token).
    pub fn poll_token_wanted(&mut self) -> bool {
        match &mut self.login {
            Some(login) if login.phase == Phase::Wanted => {
                login.phase = Phase::Asked;
                true
            }
            _ => false,
        }
    }

    /// Input: the token that was [wanted](Self::poll_token_wanted), or `None` if there is none now.
    /// One that does not expire later than the last is not sent: another one is wanted a second later.
    pub fn renew_token(&mut self, now: Instant, wall: Duration, token: Option<&Token>) {
        let Some(login) = &mut self.login else { return };
        let Some(token) = token.filter(|token| login.accepted.is_older_than(token)) else {
            return login.ask_again(now);
        };
        // The text of a token holds nothing that cannot be sent.
        let Ok(message) = encode_bearer(token.as_str()) else { return login.ask_again(now) };
        let opaque = self.opaques.connection();
        login.offered = Some(Valid::new(token, now, wall));
        // Allocated once: growing would leave a copy of the token behind.
        let name = Mechanism::OAuthBearer.name().as_bytes();
        let len = Header::LEN.saturating_add(name.len()).saturating_add(message.len());
        let mut packet = Zeroizing::new(Vec::with_capacity(len));
        let sasl = Sasl { mechanism: name, message: &message };
        let encoded = sasl.encode_auth(opaque, &mut *packet);
        debug_assert!(encoded.is_ok(), "a token fits a packet");
        login.unsent = packet;
        login.phase = Phase::Sent(opaque);
    }

    /// Output: moves the packet with a token to the end of `out`, to be sent between two other
    /// packets; `false` if there is none. Erase it once it is sent.
    pub fn poll_transmit_token(&mut self, out: &mut impl BufMut) -> bool {
        let Some(login) = self.login.as_mut().filter(|login| !login.unsent.is_empty()) else {
            return false;
        };
        out.put_slice(&login.unsent);
        login.unsent = Zeroizing::default();
        true
    }

    /// Whether everything but a token is held back, or comes after one.
    pub(super) fn is_held_back(&self) -> bool {
        let holds = |login: &Login| login.held_since.is_some() || !login.unsent.is_empty();
        self.login.as_deref().is_some_and(holds)
    }

    /// Whether the connection waits for a valid token.
    pub(super) fn is_without_token(&self) -> bool {
        self.login.as_ref().is_some_and(|login| login.held_since.is_some())
    }

    pub(super) fn advance_login(&mut self, now: Instant) -> Result<(), ConnectionError> {
        self.login.as_mut().map_or(Ok(()), |login| login.advance(now))
    }

    pub(super) fn login_deadline(&self) -> Option<Instant> {
        self.login.as_ref()?.deadline()
    }

    /// The answer to SASL_AUTH; `false` if none was sent.
    pub(super) fn token_answered(&mut self, frame: &Frame<'_>) -> bool {
        let Header { opaque, .. } = frame.header;
        let Some(login) = self.login.as_mut().filter(|login| login.phase == Phase::Sent(opaque))
        else {
            return false;
        };
        login.answer = Some((frame.header.status(), ErrorContext::of(frame.value)));
        true
    }

    /// Sends again what the server refused with AUTH_STALE, after a newer token; `false` if the
    /// connection has no token to renew.
    pub(super) fn refused_as_stale(&mut self, frame: &Frame<'_>) -> bool {
        let Some(login) = &mut self.login else { return false };
        login.was_refused = true;
        let Header { opcode, opaque, .. } = frame.header;
        let stream = self.streams.get_mut(vbid_of(opaque).index()).and_then(Option::as_mut);
        let stream = stream.filter(|stream| stream.opaque == opaque);
        match opcode {
            Opcode::DCP_BUFFER_ACK => self.send_ack(opaque.0),
            Opcode::DCP_STREAM_REQ => {
                if let Some(stream) = stream.filter(|stream| stream.state == State::Requested) {
                    RequestContext::new(&self.config).encode(stream, &mut self.transmit);
                }
            }
            Opcode::DCP_CLOSE_STREAM => {
                if let Some(stream) = stream {
                    send_close(stream, &mut self.transmit);
                }
            }
            _ => self.ask_again(opaque, opcode),
        }
        true
    }

    /// Acknowledges bytes. The server does not answer, unless it refuses: then the opaque says how
    /// many were refused.
    pub(super) fn send_ack_that_may_be_refused(&mut self, bytes: u32) {
        let ack = Frame::request(Opcode::DCP_BUFFER_ACK).with_opaque(Opaque(bytes));
        send(&ack.with_extras(&bytes.to_be_bytes()), &mut self.transmit);
    }
}
