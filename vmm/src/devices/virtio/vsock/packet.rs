//! Headers of packets (virtio 1.2, section 5.10.6).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The host's context identifier (CID).
pub const HOST_CID: u64 = 2;

/// The most bytes that a packet carries behind its header, as in Linux.
pub const MAX_PAYLOAD: u32 = 64 << 10;

/// A flag of a shutdown: the sender will not receive any more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// A flag of a shutdown: the sender will not send any more.
pub const SHUTDOWN_SEND: u32 = 2;
/// The sender closes.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// The kind of socket: streams are all that this device has.
pub const TYPE_STREAM: u16 = 1;

/// Operations.
pub mod op {
    /// Asks for a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts a connection.
    pub const RESPONSE: u16 = 2;
    /// There is no such connection, or not any more.
    pub const RST: u16 = 3;
    /// What the flags say.
    pub const SHUTDOWN: u16 = 4;
    /// Data.
    pub const RW: u16 = 5;
    /// Nothing but the credit that every packet has.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Asks for a packet with the credit.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// The header of a packet.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct Header {
    /// The sender.
    pub src_cid: U64,
    /// The receiver.
    pub dst_cid: U64,
    /// The sender's port.
    pub src_port: U32,
    /// The receiver's port.
    pub dst_port: U32,
    /// Bytes behind the header.
    pub len: U32,
    /// The kind of socket.
    pub kind: U16,
    /// What the packet is for: see [`op`].
    pub op: U16,
    /// Of a shutdown.
    pub flags: U32,
    /// Bytes that the sender can hold for this connection in all.
    pub buf_alloc: U32,
    /// Bytes that the sender has taken out of there so far, modulo 2^32.
    pub fwd_cnt: U32,
}

impl Header {
    /// Its length in bytes.
    pub const LENGTH: usize = size_of::<Header>();

    /// The answer to this packet that there is no such connection.
    #[must_use]
    pub fn reset(&self) -> Header {
        Header {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: op::RST.into(),
            ..Header::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_where_the_standard_has_them() {
        assert_eq!(Header::LENGTH, 44);
        let bytes: Vec<u8> = (0..44).collect();
        let header = Header::read_from_bytes(&bytes).unwrap();
        assert_eq!(header.src_cid.get(), 0x0706_0504_0302_0100);
        assert_eq!(header.src_port.get(), 0x1312_1110);
        assert_eq!((header.kind.get(), header.op.get()), (0x1d1c, 0x1f1e));
        assert_eq!(header.fwd_cnt.get(), 0x2b2a_2928);
        assert_eq!(header.as_bytes(), bytes);
    }
}
