//! Requests to a peer that may refuse before it is asked.

use std::io::{self, ErrorKind, Write};

/// Sends a request, whose answer is read next. A peer that refuses at once has said why and closed before this came, so
/// that it is none any more (EPIPE): the reason is for the reader to find.
///
/// # Errors
/// When the connection fails otherwise.
pub fn send_request(mut to: impl Write, request: &[u8]) -> io::Result<()> {
    match to.write_all(request) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        sent => sent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    // Whoever took the broken pipe for the end would not read why it was refused.
    #[test]
    fn what_was_said_before_the_request_can_be_read() {
        let (mut peer, mut stream) = UnixStream::pair().unwrap();
        peer.write_all(b"ERR no room\n").unwrap();
        drop(peer);
        send_request(&stream, b"status\n").unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert_eq!(said, "ERR no room\n");
    }

    // A connection that is stuck would be taken for one that was asked.
    #[test]
    fn other_failures_are_told() {
        let (_peer, stream) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let error = send_request(&stream, &vec![0; 64 << 20]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
    }
}
