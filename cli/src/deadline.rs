//! A stream that has to deliver until a moment.

use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::net::sockopt::{Timeout, set_socket_timeout};

/// A stream whose reads fail from a moment on, if there is such a moment.
pub struct Deadline<S> {
    pub stream: S,
    pub until: Option<Instant>,
}

impl<S: Read + AsFd> Read for Deadline<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(until) = self.until {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            set_socket_timeout(&self.stream, Timeout::Recv, Some(left))?;
        }
        self.stream.read(buffer)
    }
}
