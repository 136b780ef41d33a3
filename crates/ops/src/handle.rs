//! Handles of a device's objects. Each carries the id of its device.

use std::{
    num::NonZeroU16,
    sync::atomic::{AtomicU16, Ordering::Relaxed},
};

use crate::error::Error;

/// Identity of an open device. Its handles carry the id, and a device refuses all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(NonZeroU16);

impl DeviceId {
    /// Id of handles that refer to no object.
    const NONE: Self = Self(NonZeroU16::MAX);

    /// Returns the id of a new device. Ids repeat after 65,534 devices.
    #[doc(hidden)]
    #[inline]
    pub fn next() -> Self {
        static OPENED: AtomicU16 = AtomicU16::new(0);
        Self(NonZeroU16::MIN.saturating_add(OPENED.fetch_add(1, Relaxed) % (u16::MAX - 1)))
    }

    /// Handle of the object with this index.
    #[doc(hidden)]
    #[inline]
    pub const fn handle(self, index: usize) -> Handle {
        Handle { device: self, index: index as u32 }
    }

    /// Checks that a handle of `kind` is one of this device.
    fn check_owner(self, kind: &'static str, owner: Self) -> Result<(), Error> {
        if owner == self { Ok(()) } else { Err(Error::ForeignHandle { kind }) }
    }
}

/// Device and index of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    device: DeviceId,
    index: u32,
}

impl Handle {
    /// Returns the index of an object of `device`.
    ///
    /// # Errors
    /// The handle is one of another device.
    #[inline]
    pub fn index_on(self, device: DeviceId, kind: &'static str) -> Result<usize, Error> {
        device.check_owner(kind, self.device)?;
        Ok(self.index as usize)
    }
}

/// Handle of an f32 buffer on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer(pub Handle);

impl Buffer {
    /// Buffer of views inside an op, which no caller has a handle of.
    #[doc(hidden)]
    pub const INTERNAL: Self = Self(DeviceId::NONE.handle(0));
}

/// Handle of a resident weight matrix on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Weight(pub Handle);

/// Handle of the state of one layer of one sequence on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State(pub Handle);

/// Handle of a table from expert id to slot, for one layer on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotTable(pub Handle);

/// Handle of a bank of slots: one allocation of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bank {
    device: DeviceId,
    /// Index of the bank on its device.
    #[doc(hidden)]
    pub index: u16,
}

impl Bank {
    /// Handle of bank `index` of a device.
    ///
    /// # Errors
    /// The device has too many banks.
    #[doc(hidden)]
    #[inline]
    pub fn new(device: DeviceId, index: usize) -> Result<Self, Error> {
        let index = u16::try_from(index)
            .map_err(|_| Error::Shape("more than 65536 banks of slots".into()))?;
        Ok(Self { device, index })
    }

    /// Returns the index of a bank of `device`.
    ///
    /// # Errors
    /// The bank is one of another device.
    #[doc(hidden)]
    #[inline]
    pub fn index_on(self, device: DeviceId) -> Result<usize, Error> {
        device.check_owner("slot", self.device)?;
        Ok(self.index.into())
    }
}

/// Address of the memory of one expert: a bank and an index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot {
    /// The bank.
    pub bank: Bank,
    /// Index of the slot in the bank.
    pub index: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_refused_by_other_devices() {
        let [one, other] = [(); 2].map(|()| DeviceId::next());
        assert_ne!(one, other);
        assert_eq!(one.handle(7).index_on(one, "weight").unwrap(), 7);
        let error = one.handle(7).index_on(other, "weight").unwrap_err();
        assert!(matches!(error, Error::ForeignHandle { kind: "weight" }), "{error}");
        let bank = Bank::new(one, 3).unwrap();
        assert_eq!(bank.index_on(one).unwrap(), 3);
        assert!(matches!(bank.index_on(other), Err(Error::ForeignHandle { kind: "slot" })));
        assert!(Buffer::INTERNAL.0.index_on(one, "buffer").is_err());
    }

    /// The memory plan counts lists of slots and states.
    #[test]
    fn handles_are_small() {
        assert_eq!([size_of::<Slot>(), size_of::<State>(), size_of::<Option<State>>()], [8; 3]);
    }
}
