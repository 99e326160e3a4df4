//! The first byte of every packet.

use crate::wire_enum;

wire_enum! {
    /// The first byte of a packet: its direction and form (server page "BinaryProtocol").
    Magic(u8) {
        /// A request with framing extras.
        ALT_CLIENT_REQUEST = 0x08, "AltClientRequest";
        /// A response with framing extras.
        ALT_CLIENT_RESPONSE = 0x18, "AltClientResponse";
        /// A request, including those a DCP producer sends to its client.
        CLIENT_REQUEST = 0x80, "ClientRequest";
        /// A response.
        CLIENT_RESPONSE = 0x81, "ClientResponse";
        /// A server request outside DCP (cluster map pushes).
        SERVER_REQUEST = 0x82, "ServerRequest";
        /// The response to a server request.
        SERVER_RESPONSE = 0x83, "ServerResponse";
    }
}

impl Magic {
    /// Whether byte 2 is the length of framing extras and byte 3 the key length.
    #[must_use]
    pub const fn is_alt(self) -> bool {
        matches!(self, Self::ALT_CLIENT_REQUEST | Self::ALT_CLIENT_RESPONSE)
    }

    /// Whether bytes 6 and 7 are a status instead of a vBucket id.
    #[must_use]
    pub const fn is_response(self) -> bool {
        matches!(self, Self::CLIENT_RESPONSE | Self::ALT_CLIENT_RESPONSE | Self::SERVER_RESPONSE)
    }
}
