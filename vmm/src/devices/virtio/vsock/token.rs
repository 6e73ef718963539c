//! What events of epoll are about.

use super::connection::Key;

/// Ports from here on are no connections': their tokens are those of everything else.
pub(super) const RESERVED_PORTS: u32 = u32::MAX - 2;

/// What an event of epoll is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    /// The queues, or somebody in this process.
    Bell,
    /// The host's socket.
    Listener,
    /// Somebody who has connected there and not said where to.
    Client(u32),
    /// The rest of a connection.
    Rest(u32),
    Connection(Key),
}

impl Token {
    pub(super) fn pack(self) -> u64 {
        let (high, low) = match self {
            Token::Bell => (u32::MAX, 0),
            Token::Listener => (u32::MAX, 1),
            Token::Client(id) => (u32::MAX - 1, id),
            Token::Rest(id) => (RESERVED_PORTS, id),
            Token::Connection(key) => (key.local, key.guest),
        };
        u64::from(high) << 32 | u64::from(low)
    }

    pub(super) fn unpack(token: u64) -> Token {
        #[expect(clippy::cast_possible_truncation, reason = "two halves")]
        let (high, low) = ((token >> 32) as u32, token as u32);
        match high {
            u32::MAX if low == 0 => Token::Bell,
            u32::MAX => Token::Listener,
            _ if high == u32::MAX - 1 => Token::Client(low),
            RESERVED_PORTS => Token::Rest(low),
            local => Token::Connection(Key { local, guest: low }),
        }
    }
}
