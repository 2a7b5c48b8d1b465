//! Numbers that look random and are the same in each run (splitmix64).

/// What the state grows by with each number.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the number that follows a state.
pub fn mixed(state: u64) -> u64 {
    let mut mixed = state.wrapping_add(STEP);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
