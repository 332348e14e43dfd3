//! A network that exists for one test: addresses on its loopback device, servers on them, and DNS.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Set in the process that runs inside of the namespaces.
const INSIDE: &str = "REMOE_TEST_INSIDE_NETWORK";
/// Seconds for such a process.
const SECONDS: &str = "300";

/// Runs `test` in network, mount and process namespaces of its own. `name` is that of the calling test.
///
/// # Panics
/// The test fails, or the namespaces cannot be made: that takes root, or a kernel that lets users make them.
pub(crate) fn inside(name: &str, test: impl AsyncFnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        return runtime.block_on(test());
    }
    let mut command = Command::new("timeout");
    command.args([SECONDS, "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    if !rustix::process::geteuid().is_root() {
        command.arg("--map-root-user");
    }
    command.arg(std::env::current_exe().unwrap()).args(["--exact", name, "--nocapture"]).env(INSIDE, "1");
    let output = command.output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{name} failed in its namespaces ({}), which take root, or users that may make namespaces:\n{said}",
        output.status
    );
}

/// Runs commands of a shell.
fn shell(script: &str) {
    let output = Command::new("bash").args(["-euc", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

#[derive(Default)]
struct NetworkState {
    /// Connections to the servers that count them.
    counted: BTreeMap<IpAddr, usize>,
    /// Where the redirecting server leads.
    target: String,
    /// Answers of DNS, one after the other; the last one stays.
    names: BTreeMap<String, VecDeque<IpAddr>>,
    /// Questions for addresses of IPv4.
    asked: BTreeMap<String, usize>,
}

/// The network of this process.
pub(crate) struct Network {
    state: Arc<Mutex<NetworkState>>,
}

impl Network {
    /// Gives this process `addresses`, and itself as server of DNS.
    pub(crate) fn new(addresses: &[&str]) -> Self {
        let mut script = "ip link set lo up\n".to_owned();
        for address in addresses {
            let options = if address.contains(':') { "/128 dev lo nodad" } else { "/32 dev lo" };
            writeln!(script, "ip address add {address}{options}").unwrap();
        }
        // As the system asks for names where nothing else does.
        script += "folder=$(mktemp --directory)
            mount -t tmpfs tmpfs $folder
            printf 'nameserver 127.0.0.1\\noptions timeout:2 attempts:2\\n' > $folder/resolv.conf
            printf 'hosts: files dns\\n' > $folder/nsswitch.conf
            for file in resolv.conf nsswitch.conf; do
                if test -e /etc/$file; then mount --bind $folder/$file /etc/$file; fi
            done";
        shell(&script);
        let network = Self { state: Arc::default() };
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 53)).unwrap();
        let state = Arc::clone(&network.state);
        thread::spawn(move || {
            let mut question = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut question) {
                if let Some(answer) = state.lock().unwrap().answer(&question[..length]) {
                    socket.send_to(&answer, from).unwrap();
                }
            }
        });
        network
    }

    /// A server that counts its connections.
    pub(crate) fn count(&mut self, listen: SocketAddr) {
        let state = Arc::clone(&self.state);
        serve(listen, move |stream| {
            *state.lock().unwrap().counted.entry(listen.ip()).or_default() += 1;
            answer(stream, "404 Not Found", "");
        });
    }

    /// A server that redirects all requests.
    pub(crate) fn redirect(&mut self, listen: SocketAddr) {
        let state = Arc::clone(&self.state);
        serve(listen, move |stream| {
            let target = state.lock().unwrap().target.clone();
            answer(stream, "302 Found", &target);
        });
    }

    /// A server that ends all connections.
    pub(crate) fn hang_up(&mut self, listen: SocketAddr) {
        serve(listen, drop);
    }

    /// Has the redirecting server lead to `url`, with the name of the file behind it.
    pub(crate) fn redirects_to(&mut self, url: &str) {
        url.clone_into(&mut self.state.lock().unwrap().target);
    }

    /// Has DNS answer with `addresses`, one after the other.
    pub(crate) fn name(&mut self, name: &str, addresses: &[&str]) {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        self.state.lock().unwrap().names.insert(name.to_owned(), addresses);
    }

    /// How often `address` was connected to.
    pub(crate) fn counted(&self, address: &str) -> usize {
        self.state.lock().unwrap().counted.get(&address.parse::<IpAddr>().unwrap()).copied().unwrap_or(0)
    }

    /// How often DNS was asked for `name`.
    pub(crate) fn asked(&self, name: &str) -> usize {
        self.state.lock().unwrap().asked.get(name).copied().unwrap_or(0)
    }
}

fn serve(listen: SocketAddr, on_connection: impl Fn(TcpStream) + Send + 'static) {
    let listener = TcpListener::bind(listen).unwrap();
    thread::spawn(move || listener.incoming().flatten().for_each(on_connection));
}

/// Reads the head of a request and answers; `target` with the last part of its path is where a redirect leads.
fn answer(mut stream: TcpStream, status: &str, target: &str) {
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let (mut head, mut part) = (Vec::new(), [0; 1024]);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut part) {
            Ok(0) | Err(_) => return,
            Ok(length) => head.extend_from_slice(&part[..length]),
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default();
    let file = path.rsplit('/').next().unwrap_or_default();
    let location = if target.is_empty() { String::new() } else { format!("Location: {target}/{file}\r\n") };
    let answer = format!("HTTP/1.1 {status}\r\n{location}Content-Length: 0\r\nConnection: close\r\n\r\n");
    // Who asked may be gone.
    let _gone = stream.write_all(answer.as_bytes());
}

impl NetworkState {
    /// The answer to a question of DNS (RFC 1035): one address, or none.
    fn answer(&mut self, question: &[u8]) -> Option<Vec<u8>> {
        let (mut at, mut labels) = (12, Vec::new());
        loop {
            let length = usize::from(*question.get(at)?);
            at += 1;
            if length == 0 {
                break;
            }
            labels.push(String::from_utf8_lossy(question.get(at..at + length)?).to_lowercase());
            at += length;
        }
        let name = labels.join(".");
        let kind = question.get(at..at + 2)?;
        let asked = question.get(12..at + 4)?;
        let (is_v4, is_v6) = (kind == [0, 1], kind == [0, 28]);
        let known = self.names.get_mut(&name);
        let exists = known.is_some();
        let mut found = None;
        if let Some(addresses) = known {
            let next = addresses.front().copied()?;
            if (is_v4 && next.is_ipv4()) || (is_v6 && next.is_ipv6()) {
                found = Some(next);
                *self.asked.entry(name).or_default() += 1;
                if addresses.len() > 1 {
                    addresses.pop_front();
                }
            }
        }
        let mut answer = question.get(..2)?.to_vec();
        // A final answer; NXDOMAIN for names that do not exist.
        answer.extend([
            0x81,
            if exists { 0x80 } else { 0x83 },
            0,
            1,
            0,
            u8::from(found.is_some()),
            0,
            0,
            0,
            0,
        ]);
        answer.extend(asked);
        if let Some(address) = found {
            let bytes = match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            // The name of the question, its type and class, no time to live.
            answer.extend([0xc0, 12]);
            answer.extend(kind);
            answer.extend([0, 1, 0, 0, 0, 0, 0, bytes.len() as u8]);
            answer.extend(bytes);
        }
        Some(answer)
    }
}
