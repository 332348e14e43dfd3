//! The terminal of `remoe top`: another screen, keys as they are pressed, and everything back at the end.

use crate::exit::CliError;
use console::Term;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, isatty, tcgetattr, tcsetattr};
use std::io::{self, Read, Write};
use tokio::sync::mpsc;

/// Enters the alternate screen and hides the cursor; the other way round at the end.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";

/// Keys that mean something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    /// Sort by the column to the right.
    Next,
    /// Sort by the column to the left.
    Previous,
    Reverse,
}

/// The screen, until it is dropped.
pub(super) struct Screen {
    terminal: Term,
    /// Modes of standard input as they were, if it is a terminal.
    modes: Option<Termios>,
}

impl Screen {
    /// Takes the terminal. Ctrl-C stays a signal; Ctrl-Z and Ctrl-\ do nothing, because they would leave the terminal as it
    /// is.
    pub(super) fn enter() -> Result<Self, CliError> {
        let failed =
            |error: rustix::io::Errno| CliError::runtime(format!("cannot change terminal modes: {error}"));
        let modes = match isatty(io::stdin()) {
            true => Some(tcgetattr(io::stdin()).map_err(failed)?),
            false => None,
        };
        // From here on dropping it restores everything.
        let screen = Self { terminal: Term::stdout(), modes };
        if let Some(modes) = &screen.modes {
            let mut raw = modes.clone();
            raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            raw.special_codes[SpecialCodeIndex::VSUSP] = 0;
            raw.special_codes[SpecialCodeIndex::VQUIT] = 0;
            raw.special_codes[SpecialCodeIndex::VMIN] = 1;
            raw.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(io::stdin(), OptionalActions::Now, &raw).map_err(failed)?;
        }
        write(ENTER)?;
        Ok(screen)
    }

    /// Returns keys as they are pressed, from a thread that ends with the process; none if standard input is no terminal.
    pub(super) fn keys(&self) -> mpsc::Receiver<Key> {
        let (says, keys) = mpsc::channel(16);
        if self.modes.is_some() {
            std::thread::spawn(move || {
                let mut bytes = [0; 64];
                // A key that is pressed comes as a whole.
                while let Ok(count @ 1..) = io::stdin().read(&mut bytes) {
                    for key in parse(&bytes[..count]) {
                        if says.blocking_send(key).is_err() {
                            return;
                        }
                    }
                }
            });
        }
        keys
    }

    /// Shows `body` from the top and `footer` in the last line, cut to the size that the terminal has now.
    pub(super) fn draw(&self, body: &str, footer: &str) -> io::Result<()> {
        let (height, width) = self.terminal.size();
        write(frame(body, footer, height.into(), width.into()).as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing any more.
        let _gone = write(LEAVE);
        if let Some(modes) = &self.modes {
            // Keys that were pressed meanwhile are not for the shell.
            let _gone = tcsetattr(io::stdin(), OptionalActions::Flush, modes);
        }
    }
}

fn write(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// Returns what is written for one picture: nothing of it scrolls, and nothing of the one before is left.
fn frame(body: &str, footer: &str, height: usize, width: usize) -> String {
    let cut = |line: &str| line.chars().filter(|c| !c.is_control()).take(width).collect::<String>();
    let mut frame = "\x1b[H".to_owned();
    let room = height.saturating_sub(1);
    for line in body.lines().take(room) {
        frame.push_str(&format!("{}\x1b[K\r\n", cut(line)));
    }
    frame.push_str("\x1b[J");
    if height > 0 {
        frame.push_str(&format!("\x1b[{height};1H{}\x1b[K", cut(footer)));
    }
    frame
}

/// Returns the keys in what a terminal sends.
fn parse(bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    let mut rest = bytes;
    loop {
        let (key, length) = match rest {
            [] => return keys,
            // Arrows, in both modes of the cursor keys.
            [0x1b, b'[' | b'O', b'C' | b'B', ..] => (Some(Key::Next), 3),
            [0x1b, b'[' | b'O', b'D' | b'A', ..] => (Some(Key::Previous), 3),
            // Another key with a sequence of its own.
            [0x1b, b'[' | b'O', more @ ..] => {
                let end = more.iter().position(|byte| (0x40..=0x7e).contains(byte));
                (None, 2 + end.map_or(more.len(), |end| end + 1))
            }
            [b'q' | b'Q' | 0x03 | 0x04, ..] => (Some(Key::Quit), 1),
            [b's', ..] => (Some(Key::Next), 1),
            [b'S', ..] => (Some(Key::Previous), 1),
            [b'r' | b'R', ..] => (Some(Key::Reverse), 1),
            _ => (None, 1),
        };
        keys.extend(key);
        rest = rest.get(length..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_arrows_are_told_apart() {
        use Key::{Next, Previous, Quit, Reverse};
        for (bytes, keys) in [
            (&b"q"[..], vec![Quit]),
            (b"\x1b[C\x1b[D", vec![Next, Previous]),
            (b"\x1bOB\x1bOA", vec![Next, Previous]),
            (b"ssr", vec![Next, Next, Reverse]),
            (b"S", vec![Previous]),
            // Delete, F5 with a modifier, and a lone Escape.
            (b"\x1b[3~\x1b[15;2~x", vec![]),
            (b"\x1b", vec![]),
            (b"\x1b[", vec![]),
        ] {
            assert_eq!(parse(bytes), keys, "{bytes:?}");
        }
    }

    #[test]
    fn frame_is_cut_to_the_terminal() {
        let frame = frame("one long line\ntwo\x1b[31m\nthree", "quit", 3, 5);
        assert_eq!(frame, "\x1b[Hone l\x1b[K\r\ntwo[3\x1b[K\r\n\x1b[J\x1b[3;1Hquit\x1b[K");
    }
}
