//! Limits that both ends of a connection rely on.

/// Version of the contracts in `proto/`. Every change that an older peer would misread increments it.
pub const WIRE_VERSION: u32 = 1;

/// Largest `Forward` message in bytes, in either direction.
pub const MAX_MESSAGE: usize = 4 << 20;

/// Largest payload of rows in one `Forward` message, in bytes: [`MAX_MESSAGE`] less a reserve for ids, counts and
/// framing.
pub const MAX_PAYLOAD: usize = MAX_MESSAGE - (512 << 10);

/// Largest answer of the control service, in bytes: enough for the logits of one position and the routing of a long
/// prompt.
pub const MAX_CONTROL_MESSAGE: usize = 256 << 20;

/// Largest answer of `Describe` and `SetRouting`, in bytes, which callers enforce. It fits listings of 1,024 layers
/// or 8,192 endpoints, but not both at once.
pub const MAX_DESCRIPTION: usize = 1 << 20;

/// Largest number of endpoints in one routing: each takes a connection of the main function.
pub const MAX_ENDPOINTS: usize = 1 << 13;

/// Largest number of layers in a description, several times that of any published model.
pub const MAX_LAYERS: usize = 1 << 10;
/// Largest number of experts per layer in a description, several times that of any published model.
pub const MAX_EXPERTS: usize = 1 << 12;

/// Largest request of the control service, in bytes: placements, and prompts as text or ids.
pub const MAX_CONTROL_REQUEST: usize = 8 << 20;

/// HTTP/2 flow-control window of a stream and of its connection, in bytes. The default of the protocol, 64 KiB, would
/// stall a prefill message several times.
pub const STREAM_WINDOW: u32 = 8 << 20;

/// Largest step from the routing generation in force to the next. No launcher counts that far, and such steps never
/// exhaust the numbers: there is always a greater one.
pub const GENERATION_STEP: u64 = 1 << 32;

/// Returns the largest next generation that a main function accepts with generation `in_force` (0: none).
pub fn largest_generation(in_force: u64) -> u64 {
    in_force.saturating_add(GENERATION_STEP)
}
