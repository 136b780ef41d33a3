//! Global allocator: the system's, with the memory of chat templates counted.
//!
//! A template comes from a stranger, and its renderer has no limit of memory for every operator.
//! `moeflux::text` stops a rendering above 64 MiB, if it learns of its allocations.

use std::alloc::{GlobalAlloc, Layout, System};

use moeflux::text::{count_allocation, count_deallocation};

struct CountedAlloc;

#[global_allocator]
static ALLOCATOR: CountedAlloc = CountedAlloc;

// SAFETY: all calls are forwarded unchanged to the system's allocator. Counting neither allocates
// nor unwinds; it may never return.
unsafe impl GlobalAlloc for CountedAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size());
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks may exist for a moment.
        count_allocation(size);
        count_deallocation(layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count_deallocation(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}
