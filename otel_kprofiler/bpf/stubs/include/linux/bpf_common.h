/* bcc includes this file, but uses nothing from it here. */
