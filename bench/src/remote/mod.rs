//! A remote-expert function under measurement: the process and a conversation with it.

mod conversation;
mod function;

pub(crate) use conversation::{Conversation, Wait};
pub(crate) use function::RemoteFunction;
