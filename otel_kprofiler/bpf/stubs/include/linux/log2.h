/* Empty stub: bcc's headers include this file, but these programs do not use it. */
