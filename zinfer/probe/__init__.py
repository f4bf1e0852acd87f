"""Measure the machine: the PCIe link, host memory, the disk and the device; and warn of bottlenecks."""
