//! Tests of the socket device, which play the driver.

mod driver;
mod flow;
mod hostile;
mod opening;

use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use driver::Driver;
use vmtrace::devices::virtio::vsock::packet::op;
use vmtrace::devices::virtio::vsock::{Incoming, Limits, Options};

const SECOND: Duration = Duration::from_secs(1);
const PORT: u32 = 1024;

fn started(options: &Options) -> Driver {
    let mut driver = Driver::new(options);
    driver.start();
    driver
}

fn plain() -> Driver {
    started(&Options::default())
}

fn with_limits(limits: Limits) -> Driver {
    started(&Options { limits, ..Options::default() })
}

/// Where connections of the guest to [`PORT`] arrive.
fn served(driver: &Driver) -> Receiver<Incoming> {
    let (sender, receiver) = channel();
    driver.host.listen(PORT, move |incoming| sender.send(incoming).unwrap()).unwrap();
    receiver
}

/// A connection of the guest's port to a service.
fn connected(driver: &mut Driver, service: &Receiver<Incoming>, guest_port: u32) -> UnixStream {
    assert_eq!(driver.connect(PORT, guest_port).op(), op::RESPONSE);
    let incoming = service.recv_timeout(SECOND).unwrap();
    assert_eq!((incoming.port, incoming.guest_port), (PORT, guest_port));
    incoming.stream
}
