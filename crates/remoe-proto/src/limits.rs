//! Sizes that both ends of the wire rely on.

/// Version of the contracts in `proto/`; raised by every change that an older peer would misread.
pub const WIRE_VERSION: u32 = 1;

/// Largest `Forward` message in bytes, in either direction.
pub const MAX_MESSAGE: usize = 4 << 20;

/// Largest payload of rows in one `Forward` message in bytes: what [`MAX_MESSAGE`] leaves beside
/// ids, counts and framing.
pub const MAX_PAYLOAD: usize = MAX_MESSAGE - (512 << 10);

/// Largest answer of the control service in bytes: the logits of one position and the routing of
/// a long prompt fit.
pub const MAX_CONTROL_MESSAGE: usize = 256 << 20;

/// Largest answer of `Describe` and `SetRouting` in bytes, and the decoding limit of its callers: listings of 1,024
/// layers or 8,192 endpoints, a fraction of that if both are large.
pub const MAX_DESCRIPTION: usize = 1 << 20;

/// Endpoints that one routing may name: each becomes a connection of the main function.
pub const MAX_ENDPOINTS: usize = 1 << 13;

/// Layers of one model, and experts of one layer, in a description: several times those of any published one.
pub const MAX_LAYERS: usize = 1 << 10;
/// See [`MAX_LAYERS`].
pub const MAX_EXPERTS: usize = 1 << 12;

/// Largest request of the control service in bytes: placements, and prompts as text or ids.
pub const MAX_CONTROL_REQUEST: usize = 8 << 20;

/// HTTP/2 flow-control window in bytes of a stream and of its connection. The protocol's default of
/// 64 KiB would stall a prefill message several times.
pub const STREAM_WINDOW: u32 = 8 << 20;

/// How far a routing generation may be beyond the one in force. No launcher counts that far, and steps
/// of this size never use the numbers up: whatever is in force, there is a greater one.
pub const GENERATION_STEP: u64 = 1 << 32;

/// The largest number that a main function with generation `in_force` (0: none) accepts for the next.
pub fn largest_generation(in_force: u64) -> u64 {
    in_force.saturating_add(GENERATION_STEP)
}
