//! The least that an exchange can cost: TCP on loopback, both sides spinning, nothing in between.

use crate::error::{BenchError, ErrorContext, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Exchanges before the measured ones.
const WARM_UP: usize = 50;

/// Sends `request` bytes and receives `answer` bytes, `exchanges` times; how long each took. The other
/// side lives no longer than the call.
pub(super) fn exchange(exchanges: usize, request: usize, answer: usize) -> Result<Vec<Duration>> {
    let exchanging = || "exchanging bytes over raw TCP";
    let listener = TcpListener::bind("127.0.0.1:0").doing(exchanging)?;
    let address = listener.local_addr().doing(exchanging)?;
    std::thread::scope(|scope| {
        let peer = scope.spawn(move || -> std::io::Result<()> {
            let mut stream = spinning(listener.accept()?.0)?;
            let (mut received, sent) = (vec![0; request], vec![1; answer]);
            for _ in 0..WARM_UP + exchanges {
                read(&mut stream, &mut received)?;
                write(&mut stream, &sent)?;
            }
            Ok(())
        });
        let measure = || -> std::io::Result<Vec<Duration>> {
            let mut stream = spinning(TcpStream::connect(address)?)?;
            let (sent, mut received) = (vec![2; request], vec![0; answer]);
            let mut times = Vec::with_capacity(exchanges);
            for number in 0..WARM_UP + exchanges {
                let started = Instant::now();
                write(&mut stream, &sent)?;
                read(&mut stream, &mut received)?;
                if number >= WARM_UP {
                    times.push(started.elapsed());
                }
            }
            Ok(times)
        };
        let times = measure().doing(exchanging);
        let peer = peer.join().map_err(|_| BenchError::new(exchanging(), "the peer panicked"))?;
        times.and_then(|times| peer.doing(exchanging).map(|()| times))
    })
}

fn spinning(stream: TcpStream) -> std::io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

fn read(stream: &mut TcpStream, mut bytes: &mut [u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write(stream: &mut TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
